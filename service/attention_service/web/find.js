import{p as e}from"./drawings.js";import{At as t,Ct as n,Dt as r,P as i,Q as a,S as o,T as s,Tt as c,a as l,at as u,c as d,dt as f,f as p,ft as m,g as h,gt as g,h as _,i as v,k as y,kt as b,n as x,o as S,ot as C,q as w,rt as T,s as E,t as D,u as ee,v as O}from"./ui.js";import{S as k,a as te,h as A,m as j}from"./app.js";import{u as M}from"./matrix.js";import{c as N,d as P,f as F,l as I,p as L,u as R}from"./live.js";import{r as ne}from"./pointed.js";import{a as z,c as B,i as V,l as re,n as ie,o as ae,r as H,s as oe,t as U,u as W}from"./survey.js";var se=`When Tom and Grace went to the town, Grace gave a flower to Tom.
The teacher took a letter. The red frog is in the forest. So the teacher bought a letter. So the red frog sat in the forest.
lamp, flower, letter. lamp, flower, letter. lamp, flower, letter. lamp, flower, letter.
The teacher ran to the wall and saw the flower. Clara went to the brown shop. The yellow bear came to the forest and took the key. The teacher saw a bell on the bed. Anna stood on the rock.
The small bird was in the house. Anna likes the duck. So Anna likes the duck. So the small bird slept in the house.
The yellow king stood in the park. Tom likes the rabbit. Again the yellow king slept in the park. Again Tom likes the rabbit.
The old frog lay in the barn. The grey farmer saw the queen. The white girl bought a big hat. Then the grey farmer saw the queen. Again the old frog sat in the barn. Then the white girl took a big hat.
The fox bought a flower. Ben found an apple. The horse sat on the roof. Again Ben found an apple. So the fox bought a flower. So the horse sat on the roof.
Thursday, Friday, Saturday, Sunday. Tom walked to the big garden. The frog stood on the roof. The girl sat on the wall.
Anna is in the shop. The grey bird is in the shop. Then Anna stood in the shop. Then the grey bird is in the shop.
Grace saw her apple, and she went to the shop.
Rosa said that she has a book.
After Jack and Sonu came to the shop, Jack brought a bell to Sonu. After Paul and Emma came to the school, Emma gave a lamp to Paul.
Rosa lay on the chair. Tom met the bear. So Rosa stood on the chair. Then Tom met the bear.
six, seven, eight, nine.
The cat saw Oscar when he lay on the mat.
Kate saw the farmer. The dog was on the roof. Vera sat in the town. Henry saw the frog. Then Henry saw the frog. So Vera sat in the town. Again Kate saw the farmer. Then the dog was on the roof.
The frog slept in the barn. Iris sat in the town. Sabeki stood in the town. The black cat went to the park and took the letter. Clara saw her ball, and she ran to the park.
yellow, grey, red, blue, white. yellow, grey, red, blue, white.
The bird came to the barn and saw the apple. Oscar slept on the rug.
After Saguze and Paul came to the barn, Saguze gave a hat to Paul.
The bird has a red book. Vidu slept on the wall. John bought an apple. The young cat saw the bear. Then Vidu lay on the wall. Then the young cat saw the bear. Then the bird found a red book. Then John has an apple.
Then Iris and Gafamu were at the shop, and Gafamu gave a book to Iris.
four, five, six, seven, eight, nine, ten.
duck, girl, mouse. duck, girl, mouse. duck, girl, mouse. duck, girl, mouse.
four, five, six, seven, eight, nine. The queen sat on the bench. The duck is in the forest. So the queen was on the bench. So the duck lay in the forest.
Clara has a big lamp. David bought a ball. Ben helped the bear. Anna lay on the mat. Again David had a ball. So Ben helped the bear. So Clara has a big lamp. Again Anna slept on the mat.
Ben likes the boy. Rosa was in the park. The red boy has a key. Nora is in the town. So Rosa is in the park. Then Nora lay in the town. Again Ben likes the boy. Again the red boy bought a key.
brown, yellow, white, grey, green, black. brown, yellow, white, grey, green, black. brown, yellow, white, grey, green, black.
vera lay in the park. felix took a small apple on the roof. the young horse went to the white forest
The bird took a red coin. The small fox took a hat. The bear bought a grey box. The yellow dog met the boy. Again the small fox took a hat. Then the bear took a grey box. Again the bird had a red coin. Again the yellow dog met the boy.
The old cat stood on the roof. Kate likes the dog. Then Kate likes the dog. So the old cat was on the roof.
the cat came to the forest. the bear came to the river and bought the ball. the young dog found a coin on the bench. the green frog slept on the table
The black fox slept on the table. Grace is in the forest. The young farmer took an old bell. Then Grace slept in the forest. So the black fox is on the table. So the young farmer had an old bell.
seven, five, four, two, one. seven, five, four, two, one. seven, five, four, two, one. seven, five, four, two, one.
The horse saw Emma when she lay in the barn.
Ben took a box. The little rabbit has a green ball. So the little rabbit bought a green ball. So Ben took a box. The frog helped the horse. The brown horse had a lamp. So the frog helped the horse. So the brown horse bought a lamp.
Clara went to the roof and lost the hat. Ben went to the shop and bought the blue apple. The king went to the big shop. Then Anna and Gamogu were at the town, and Anna gave a bell to Gamogu.
The teacher slept on the wall. The fox saw a lamp on the roof. The big bird walked to the school and saw the small box.
The small rabbit took a big apple. The young bird lay on the bench. So the young bird lay on the bench. Then the small rabbit had a big apple.
white, yellow, red, brown, blue. white, yellow, red, brown, blue.
fox, farmer, dog, rabbit, bear, queen, frog, girl. fox, farmer, dog, rabbit, bear, queen, frog, girl. fox, farmer, dog, rabbit, bear, queen, frog, girl. fox, farmer, dog, rabbit, bear, queen, frog, girl.
clara saw a lamp in the kitchen. henry walked to the kitchen. vera ran to the garden The farmer saw Anna when she lay in the barn. leo walked to the barn and took the black bell
john found a bell on the chair. the dog walked to the shop. varozo went to the table and saw the blue lamp
Mopuri sat on the roof. Anna likes the queen. Mary is on the mat. So Mary sat on the mat. Then Mopuri is on the roof. So Anna likes the queen. After Rosa and Vera came to the garden, Rosa brought a key to Vera.
Nora bought her cup, and she came to the forest.
bell, coin, flower, apple. bell, coin, flower, apple. bell, coin, flower, apple. bell, coin, flower, apple.
Then Iris and Dufa were at the barn, and Iris brought an apple to Dufa. Anna took her hat, and she came to the shop.
The girl saw Kate when she stood on the wall.
After Nebo and Oscar came to the forest, Nebo gave a lamp to Oscar.
After Iris and Ben came to the school, Iris gave a letter to Ben.
Kate took a yellow coin. The mouse likes the rabbit. Then the mouse likes the rabbit. Then Kate had a yellow coin.
The mouse saw Leo when he slept in the park.
After Ben and Mary came to the shop, Mary gave a bell to Ben.
The queen walked to the barn. Anna walked to the river.
The grey horse ran to the yellow garden.
Safe met the queen. The little cat slept in the barn. Again the little cat slept in the barn. Again Safe met the queen. The dog slept on the rug. Iris walked to the big town. Felix said that he has a flower.
Mary said that she has a coin.
Roru, Seluta, Veku, Pimo, Dunuko. Roru, Seluta, Veku, Pimo, Dunuko.
David lost his hat, and he came to the shop. The rabbit bought a young letter. Jack slept in the shop. So the rabbit has a young letter. Again Jack stood in the shop.
red, blue, yellow, green, white. red, blue, yellow, green, white. the girl went to the house and found the box. anna bought a ball in the school
After Anna and Paul came to the park, Paul brought a letter to Anna. Leo bought his box, and he walked to the house. Emma went to the mat and lost the big hat.
Grace found her coin, and she went to the river.
Paul likes the duck. The brown duck had a book. Tadu saw the dog. The farmer sat in the forest. Then Tadu saw the dog. So the farmer is in the forest. Again the brown duck had a book. So Paul likes the duck.
After Iris and Vera came to the park, Vera brought a letter to Iris. Henry saw his box, and he walked to the town.
The brown king saw a cup in the forest. When Rosa and Grace went to the school, Rosa brought a cup to Grace.
Felix met the rabbit. The grey boy bought a ball. So Felix met the rabbit. Then the grey boy found a ball.
the frog slept in the park seven, three, ten, nine, six, eight, two. seven, three, ten, nine, six, eight, two. seven, three, ten, nine, six, eight, two. the boy went to the old garden
Then Nora and Bopapi were at the garden, and Nora gave a cup to Bopapi.
Kate met the fox. The mouse likes the king. Again the mouse likes the king. Then Kate met the fox.
The red fox had a bell. The new rabbit met the fox. The farmer slept on the chair. Then the red fox found a bell. Then the farmer lay on the chair. Again the new rabbit met the fox.
The horse came to the bed and lost the white box. The fox went to the young school. The teacher lay in the shop.
ten, seven, one, six, two, five, four. ten, seven, one, six, two, five, four.
Vera lost her ball, and she went to the forest.
five, two, eight, nine, four. five, two, eight, nine, four. Felix stood on the bed. Mary lay in the shop. So Mary stood in the shop. Then Felix was on the bed. David bought a box in the kitchen.
Tuesday, Wednesday, Thursday.
Rosa came to the chair and bought the young bell. David walked to the new shop.
The teacher came to the rug and bought the white flower.
Grace sat on the chair.
Then Iris and Vime were at the river, and Iris brought a ball to Vime.
The frog is on the bed. The little fox had a key. Zonugo was in the park. So the frog sat on the bed. Then Zonugo slept in the park. Then the little fox has a key.
Henry bought his key, and he went to the shop.
The frog went to the forest and lost the lamp. The big teacher bought a cup on the bed. Ben went to the shop.
The brown boy has a key. The small teacher has a ball. Bileva met the fox. Then Bileva met the fox. Then the small teacher bought a ball. So the brown boy bought a key.
Kate said that she has a grey hat.
The cat bought a little box. The blue bird likes the mouse. Then the cat found a little box. So the blue bird likes the mouse.
paul slept in the school
Govevu bought a letter. Neniza had a yellow flower. Oscar sat in the barn. The mouse had a box. Again the mouse had a box. So Govevu took a letter. Then Neniza had a yellow flower. Then Oscar is in the barn.
The red teacher found a cup on the table. The rabbit ran to the wall and found the book. Then Henry and David were at the kitchen, and Henry brought a bell to David.
When Telezu and Nora went to the house, Telezu gave a hat to Nora. The teacher ran to the bed and found the small cup. three, four, five.
When Pudu and Lada went to the house, Lada gave a box to Pudu.
When Tom and Muru went to the house, Tom brought a lamp to Muru.
the white frog ran to the forest
Oscar bought a little flower. Tom found an apple. Again Oscar has a little flower. Then Tom found an apple.
flower, coin, ball. flower, coin, ball. flower, coin, ball.
Grace said that she has a coin. The duck slept on the bench. The king saw the girl. Oscar found a grey bell. Then the king saw the girl. Then the duck slept on the bench. Again Oscar found a grey bell.
The grey teacher saw the queen. The queen sat on the table. Then the queen sat on the table. So the grey teacher saw the queen.
Tom had a book. The farmer likes the farmer. The yellow fox stood on the table. The brown cat sat on the chair. So the brown cat lay on the chair. So Tom took a book. So the yellow fox stood on the table. Again the farmer likes the farmer.
Tom ran to the shop and saw the new apple. The old farmer bought a big apple on the table. The teacher lost a ball in the river. The farmer slept in the river.
When Grace and Sagami went to the forest, Grace brought a key to Sagami. four, five, six, seven, eight, nine, ten.
Then Clara and Mary were at the forest, and Clara brought a lamp to Mary.
Henry had a coin. Oscar found a bell. Again Henry had a coin. So Oscar took a bell.
When Teramo and Felix went to the forest, Felix gave a hat to Teramo. After Rosa and Anna came to the town, Anna brought a book to Rosa. Mary said that she has a hat.
Friday, Saturday, Sunday.
Iris sat on the wall. The duck ran to the garden and found the lamp. The frog came to the rug and saw the green hat.
six, seven, eight, nine, ten. Pafoma helped the horse. Iris found a box. Gesigi took a grey box. The queen had a bell. So Pafoma helped the horse. Again Gesigi has a grey box. Then the queen bought a bell. So Iris has a box.
Jack sat on the rug. The grey farmer went to the roof and saw the book. Leo went to the town and bought the green ball. Clara went to the forest and lost the book.
nine, five, ten. nine, five, ten. nine, five, ten.
Leo, Tom, Emma, Henry, Clara, Iris, Ben. Leo, Tom, Emma, Henry, Clara, Iris, Ben.
The frog took a white bell. The dog likes the fox. So the dog likes the fox. Then the frog took a white bell. David said that he has a green lamp.
The little dog met the queen. The teacher met the queen. The horse met the teacher. Pekapo saw the boy. So the teacher met the queen. Then the little dog met the queen. So Pekapo saw the boy. So the horse met the teacher.
Then Nora and Muladi were at the house, and Muladi gave a bell to Nora.
Then Mevapu and Henry were at the shop, and Henry brought a flower to Mevapu.
Reta slept on the bench. Nora came to the red garden. Rosa saw a grey cup in the school. When Fofula and Iris went to the forest, Iris brought a book to Fofula.
nora ran to the table and found the red book. the little duck saw a flower in the forest
When Mary and Vizemu went to the shop, Mary gave a key to Vizemu.
The green farmer met the girl. Jack is on the chair. So the green farmer met the girl. Again Jack slept on the chair.
John saw his key, and he walked to the shop. David went to the green school. The cat bought a yellow letter on the roof. The yellow farmer stood on the rock. Birolo came to the table and took the letter.
David lost his cup, and he ran to the town.
The bear helped the fox. Felix is on the chair. The mouse is in the garden. Then Felix lay on the chair. Again the bear helped the fox. So the mouse sat in the garden.
Nora walked to the house.
Emma stood on the rock. After Zudu and Oscar came to the barn, Zudu gave a cup to Oscar. The white rabbit went to the town and bought the letter. The new horse walked to the house.
The young farmer stood in the garden. The grey mouse likes the mouse. So the grey mouse likes the mouse. Then the young farmer stood in the garden.
nora slept on the wall. the teacher went to the wall and took the new cup. razu walked to the garden and saw the yellow lamp. the fox ran to the town
Paul met the rabbit. Fivuzi bought a cup. Zizume likes the duck. Then Paul met the rabbit. So Fivuzi has a cup. So Zizume likes the duck.
Grace ran to the table and saw the blue letter. Megidu bought a key on the bench. Mufi bought a key on the rug.
The horse bought an apple in the house. The brown horse lost a grey hat in the house. Henry bought his ball, and he walked to the shop. When Sunu and Vera went to the barn, Sunu gave a hat to Vera.
The new girl bought a red letter. The mouse has a big letter. The duck slept in the kitchen. Again the duck sat in the kitchen. Then the mouse has a big letter. So the new girl had a red letter.
When Mifa and Ben went to the shop, Ben brought a hat to Mifa. paul bought a letter in the town. john saw a book in the barn. the frog came to the house and found the red ball
Geba found a coin. Ben found a grey key. Then Geba bought a coin. Then Ben has a grey key.
The bird went to the small kitchen. Henry, Clara, David, Mary, Nora. Henry, Clara, David, Mary, Nora. The king saw Nora when she lay on the chair.
The horse found a coin. The yellow teacher saw the frog. The bear met the queen. Then the yellow teacher saw the frog. So the bear met the queen. Then the horse took a coin.
Nora said that she has a brown cup.
The boy sat on the roof. Vesipu has a blue book. Again the boy was on the roof. So Vesipu took a blue book.
When Vera and Iris went to the barn, Vera brought a book to Iris. Totani lost a yellow letter in the garden. The small frog lay on the rug. The frog walked to the forest. The green boy ran to the table and bought the new cup.
When Mary and Peseda went to the barn, Peseda brought a hat to Mary. Mary saw her ball, and she walked to the barn. ball, bell, book. ball, bell, book.
When Mary and Leo went to the school, Leo gave a key to Mary.
The duck walked to the old forest. The duck stood in the forest. The bird ran to the rug and bought the yellow book. Sugapu slept in the forest.
The bird bought a little lamp in the town. The bird lay on the table. The farmer came to the park. Vera went to the little park.
The king saw the boy. Clara had a new letter. The farmer stood in the park. So the farmer lay in the park. So Clara found a new letter. So the king saw the boy.
When Emma and Felix went to the town, Felix gave a lamp to Emma.
When Vera and Leo went to the school, Leo gave a flower to Vera.
Then Felix and Ben were at the river, and Felix gave a ball to Ben.
After Bapu and Vera came to the forest, Bapu brought a cup to Vera.
When Tude and Givo went to the house, Givo gave a coin to Tude.
The farmer went to the forest. ten, six, nine, two, five, one. ten, six, nine, two, five, one. ten, six, nine, two, five, one. When Pazopi and Gade went to the forest, Pazopi brought a key to Gade.
Then Felix and David were at the park, and David gave an apple to Felix. The bear walked to the small kitchen. The white duck went to the forest. Nora came to the blue river.
Tom has a bell. Lera has a book. So Tom bought a bell. So Lera found a book.
The bird took a ball. The blue frog slept on the bed. Again the blue frog slept on the bed. Then the bird bought a ball. Then Nora and Navo were at the barn, and Nora brought an apple to Navo.
Then Anna and Clara were at the shop, and Clara brought an apple to Anna.
sefime bought a yellow apple on the bench. the white king found a key in the school. paul went to the school. leo took a cup on the mat
The dog took a ball. Iris is on the wall. The brown duck saw the bird. So Iris was on the wall. Then the dog has a ball. Again the brown duck saw the bird.
Leo slept in the shop. Romi helped the cat. The teacher lay on the rock. Again the teacher is on the rock. So Romi helped the cat. Again Leo was in the shop.
horse, rabbit, farmer, dog. horse, rabbit, farmer, dog. horse, rabbit, farmer, dog. horse, rabbit, farmer, dog. six, two, three, ten. six, two, three, ten. six, two, three, ten.
When Binimi and Lubemu went to the barn, Binimi brought a hat to Lubemu.
the little farmer took a yellow cup on the rock. the blue girl lost a key on the mat. the boy ran to the town
Emma took a red lamp. Leo sat in the school. Henry slept in the park. Clara likes the horse. Again Emma took a red lamp. So Leo was in the school. Again Clara likes the horse. So Henry was in the park.
Henry has a hat. The boy was on the bed. Again the boy lay on the bed. So Henry took a hat.
The old frog stood on the wall. Fose found a green coin. Emma slept on the rock. So the old frog slept on the wall. Again Emma lay on the rock. Then Fose has a green coin.
When Refa and Rosa went to the forest, Refa gave an apple to Rosa. The girl saw Clara when she stood in the forest. Mary went to the little forest. The king walked to the big town. Kere slept on the rock. Anna saw a red apple on the rock.
horse, king, bird, rabbit, girl, queen. horse, king, bird, rabbit, girl, queen. horse, king, bird, rabbit, girl, queen.
Iris came to the rug and saw the yellow cup. The yellow duck came to the white park.
Anna saw her key, and she ran to the park. When Rosa and Jack went to the kitchen, Rosa gave a book to Jack. The brown bear had a ball. The rabbit saw the king. Then the rabbit saw the king. So the brown bear had a ball.
Then David and Henry were at the barn, and David brought a flower to Henry. four, six, five, three, one, nine. four, six, five, three, one, nine.
After David and Iris came to the barn, Iris gave a ball to David.
Felix lost his lamp, and he walked to the barn. Emma, David, Rosa, Leo. Emma, David, Rosa, Leo. Emma, David, Rosa, Leo. When Grace and Jack went to the park, Grace brought a key to Jack.
After Anna and Zetolu came to the shop, Anna gave a flower to Zetolu. The king saw Clara when she lay on the bench.
The fox found a book. Nori found a white book. Then Nori had a white book. Then the fox found a book. The horse saw Henry when he lay in the shop. Then Iris and Tile were at the town, and Tile brought a hat to Iris.
The cat saw Oscar when he sat on the roof. The cat walked to the park. The old dog came to the river.
David stood on the chair. The girl saw the mouse. Again David slept on the chair. So the girl saw the mouse.
Then Ravudo and Vepeso were at the school, and Vepeso brought a bell to Ravudo.
the dog stood on the rug. the brown cat lost a white book on the bench. the old fox bought a blue ball on the bed. the queen found a bell in the garden
Nora met the mouse. Mafasa met the duck. Again Nora met the mouse. So Mafasa met the duck.
Clara met the bird. Emma helped the horse. Anna had a small hat. The bird saw the dog. Again Emma helped the horse. Then Anna has a small hat. Then Clara met the bird. Then the bird saw the dog. The red duck bought a cup in the school.
Then Tom and Fafibi were at the house, and Fafibi brought an apple to Tom.
Felix said that he has a coin.
Emma walked to the shop. The grey horse sat on the rug. Oscar saw a small lamp in the town. The cat came to the school.
box, apple, ball, hat, coin, key, book. box, apple, ball, hat, coin, key, book.
key, coin, book, box, bell. key, coin, book, box, bell. key, coin, book, box, bell. key, coin, book, box, bell.
After Emma and Kate came to the shop, Kate brought a book to Emma.
Nora found a little ball. The white king took a cup. The girl saw the frog. The grey duck helped the girl. Then the white king has a cup. So Nora has a little ball. Then the grey duck helped the girl. Then the girl saw the frog.
The cat walked to the mat and bought the grey apple. The yellow bear took a big ball in the school. Melebe ran to the red river. Zuvuma ran to the roof and bought the hat.
The green farmer had a red apple. Saku was in the shop. Again the green farmer bought a red apple. Again Saku was in the shop.
Henry bought his box, and he came to the garden. the blue king sat on the mat. emma bought a lamp in the river. jack walked to the grey garden. the young girl bought a little lamp in the shop
Clara, Mary, Paul, Rosa, David, Tom, Felix, Leo. Clara, Mary, Paul, Rosa, David, Tom, Felix, Leo. Clara, Mary, Paul, Rosa, David, Tom, Felix, Leo.
Anna took her apple, and she ran to the school. The black horse went to the chair and took the cup. The black girl sat in the house. Emma walked to the barn. The small teacher lay in the barn. Leo ran to the river and saw the grey book.
Leo said that he has a bell.
Pipafo sat in the garden. Rudu helped the fox. Malapu helped the king. Again Pipafo sat in the garden. Then Rudu helped the fox. Again Malapu helped the king.
Ben stood on the bed. The white duck helped the horse. The king found a letter. The queen lay on the bed. Then the white duck helped the horse. Again the king had a letter. So the queen sat on the bed. Then Ben lay on the bed.
The bird sat in the town. Vesu was in the town. Emma helped the fox. Then Vesu was in the town. So the bird was in the town. So Emma helped the fox. Mary said that she has a coin. Minufu, Vetu, Fopemo. Minufu, Vetu, Fopemo.
Zasi likes the horse. Emma sat in the town. The mouse took a lamp. Then Emma is in the town. Then the mouse bought a lamp. Again Zasi likes the horse.
the boy went to the mat and found the white apple. the little boy ran to the school and took the old key
David lay in the house. The bear had a grey box. John slept in the house. Again John lay in the house. Then David was in the house. Again the bear has a grey box. the yellow duck came to the forest Anna said that she has an apple.
Nama bought a cup. Ben found a flower. So Nama bought a cup. Again Ben bought a flower.
When Vera and Oscar went to the park, Vera gave a bell to Oscar.
The horse saw Anna when she stood on the bed.
Then Mary and Leo were at the river, and Mary gave a letter to Leo.
After Latone and Grace came to the forest, Latone gave a lamp to Grace.
The king came to the wall and saw the white book.
Mopupa walked to the river. The green duck took a grey coin in the river.
Paul found his flower, and he came to the barn.
When Rimidi and Grace went to the shop, Rimidi brought an apple to Grace.
David was in the town. The brown bear was on the wall. The girl took a cup. Again the girl had a cup. Again the brown bear was on the wall. Then David slept in the town.
The mouse helped the bird. The white frog has a hat. The dog saw the teacher. Topuso has a hat. Then the mouse helped the bird. Then the dog saw the teacher. Then Topuso bought a hat. So the white frog took a hat.
Laga found a lamp. Mikovo was on the roof. Then Mikovo slept on the roof. So Laga bought a lamp.
The brown rabbit ran to the small kitchen. The little rabbit lay on the table. The girl saw a cup in the garden. Anna ran to the table and found the lamp.
The girl walked to the school.
Rosa found a big book. Peso met the teacher. The yellow cat is in the park. The queen had a bell. So the yellow cat is in the park. Again the queen bought a bell. Then Rosa found a big book. Then Peso met the teacher.
The old queen met the horse. Oscar met the farmer. The mouse lay on the roof. So Oscar met the farmer. Again the mouse is on the roof. Then the old queen met the horse.
Nora stood in the forest. The horse slept on the table. The blue cat met the boy. Again the horse lay on the table. Again the blue cat met the boy. Again Nora is in the forest.
ten, six, three, eight. ten, six, three, eight. ten, six, three, eight.
John, Ben, Vera, Felix, Nora. John, Ben, Vera, Felix, Nora.
Ben helped the dog. The brown cat slept on the rock. The duck likes the bird. So the duck likes the bird. Then Ben helped the dog. So the brown cat lay on the rock.
Emma slept in the school. Henry met the dog. The rabbit bought a yellow flower. Then Emma stood in the school. Then Henry met the dog. Again the rabbit had a yellow flower.
The red farmer has an apple. The dog helped the girl. Vera sat in the house. The black girl likes the king. Then the red farmer had an apple. Again the dog helped the girl. So the black girl likes the king. Then Vera lay in the house.
When Grace and Ben went to the town, Ben gave a letter to Grace. Then Leo and Emma were at the shop, and Emma brought a box to Leo.
The frog saw the farmer. The brown queen lay on the roof. Vera lay on the rug. The boy was on the table. Then the frog saw the farmer. So the boy sat on the table. So Vera sat on the rug. So the brown queen sat on the roof.
emma ran to the bed and lost the small box. nora walked to the school
the mouse walked to the school When Grace and Henry went to the forest, Henry gave a coin to Grace.
When Vera and Rilo went to the school, Rilo gave a hat to Vera.
mary lay in the school
The farmer saw Kate when she sat in the kitchen.
Jack bought his letter, and he ran to the barn.
Clara took a green ball. David slept in the shop. Vera is on the wall. So Vera stood on the wall. So Clara found a green ball. So David stood in the shop. After Pupavo and Vera came to the forest, Pupavo gave a box to Vera.
the red duck sat on the mat. john lost a green coin in the barn. tom saw a white ball on the wall
Leo said that he has a box.
After David and Felix came to the school, David gave a box to Felix.
Then Oscar and Clara were at the school, and Oscar gave a ball to Clara. Paul is in the garden. Zibinu is in the garden. So Paul lay in the garden. Again Zibinu slept in the garden.
Clara helped the boy. The duck met the dog. The big farmer bought a young book. The old frog was on the rug. So Clara helped the boy. Again the big farmer had a young book. Then the duck met the dog. So the old frog was on the rug.
After Ben and Tom came to the house, Ben brought a cup to Tom. Jack took his apple, and he walked to the park. The cat saw Ben when he slept in the park.
The cat slept in the barn. Then Henry and Jack were at the park, and Henry gave a cup to Jack.
After Henry and Paul came to the town, Henry brought a box to Paul.
the little mouse took a ball in the garden After John and Lunofe came to the garden, Lunofe gave a coin to John. The fox saw Paul when he sat in the shop.
The blue bird is on the chair. Ben took a ball. The duck bought a box. So the duck has a box. Then Ben had a ball. Again the blue bird slept on the chair.
Anna said that she has a flower.
Felix went to the school. The black teacher ran to the blue park. The bird came to the table and took the letter. Felix walked to the barn and lost the apple.
Clara, Leo, Grace, Kate, Nora, Felix. Clara, Leo, Grace, Kate, Nora, Felix.
Pugu found a coin on the bed. The dog bought a white flower on the rug.
The cat bought a green apple. The girl helped the queen. David saw the king. Then the girl helped the queen. So David saw the king. So the cat had a green apple.
setofe saw a cup on the rock. the yellow dog found a key in the barn. dusuzi ran to the school
The blue frog bought a book in the shop. Mary went to the brown town. The green bird ran to the kitchen and took the little lamp.
The boy helped the duck. The bear likes the king. Tom slept on the rock. Again Tom was on the rock. So the bear likes the king. Then the boy helped the duck. After Emma and Kisu came to the house, Emma brought a ball to Kisu.
Henry said that he has a cup. Then Oscar and Fula were at the shop, and Oscar brought a letter to Fula. After Kate and Emma came to the garden, Emma gave a hat to Kate.
david lay on the wall. mary ran to the chair and bought the black letter
When Lula and Tom went to the barn, Tom gave a cup to Lula. Felix found a box. Leo sat on the chair. So Leo was on the chair. So Felix found a box. The rabbit went to the forest and lost the white box. The girl found a blue key on the rock.
Vubupe, Soduri, Napi, Kunu, Rodovu. Vubupe, Soduri, Napi, Kunu, Rodovu. Vubupe, Soduri, Napi, Kunu, Rodovu.
brown, grey, yellow, green, blue. brown, grey, yellow, green, blue. brown, grey, yellow, green, blue.
The queen saw Mary when she lay on the rock. Oscar, Grace, Rosa, David. Oscar, Grace, Rosa, David.
After Iris and John came to the park, Iris gave a letter to John.
Jack had a white letter. The black duck has a blue bell. So the black duck had a blue bell. Again Jack has a white letter. five, ten, eight, six, two. five, ten, eight, six, two. five, ten, eight, six, two.
After Leo and Oscar came to the school, Oscar brought a letter to Leo.
the old boy ran to the kitchen. lapavi sat in the park. the bear saw a green lamp on the bench. the bird walked to the mat and found the red lamp
The girl saw Iris when she stood in the park.
After Felix and Nora came to the school, Felix gave a book to Nora.
The black queen went to the school and found the bell. The small queen stood on the roof. Nora ran to the shop. Nora walked to the table and lost the letter.
The green horse came to the big kitchen. Paul saw a small letter on the rug. Jack saw his letter, and he ran to the school. Then Iris and Rosa were at the town, and Rosa brought a hat to Iris.
Then Iris and Jack were at the forest, and Jack gave a key to Iris. Nora bought her lamp, and she came to the kitchen.
Oscar saw the girl. Anna found a brown apple. Then Oscar saw the girl. Then Anna found a brown apple.
When Bika and Tatoku went to the park, Bika gave a ball to Tatoku. Wednesday, Thursday, Friday, Saturday, Sunday.
Vera lost her cup, and she walked to the kitchen.
David, Felix, John, Oscar, Jack. David, Felix, John, Oscar, Jack. David, Felix, John, Oscar, Jack. David, Felix, John, Oscar, Jack.
After Henry and Kerefa came to the forest, Henry brought a letter to Kerefa.
Felix lost his letter, and he went to the house.
Paul lost a red cup on the chair. Emma lost a blue flower on the bed.
Emma found her ball, and she ran to the forest.
After Fazefa and Tagobi came to the forest, Tagobi gave a flower to Fazefa.
Mary, Ben, John, Anna, Jack. Mary, Ben, John, Anna, Jack. Mary, Ben, John, Anna, Jack.
Paul likes the boy. Henry helped the rabbit. Again Henry helped the rabbit. Then Paul likes the boy. The duck sat on the mat. Ruga took a yellow key. Again the duck slept on the mat. So Ruga took a yellow key.
The little boy took a green bell on the bench. The bear ran to the big house. Rosa bought her hat, and she walked to the shop.
Jack bought a new apple in the river. The bear found a cup on the wall.
The mouse helped the fox. The bird likes the teacher. So the mouse helped the fox. So the bird likes the teacher. cat, boy, bird, rabbit, mouse. cat, boy, bird, rabbit, mouse. cat, boy, bird, rabbit, mouse.
Tore helped the queen. The king bought a green box. Then Tore helped the queen. Then the king had a green box.
The horse saw Grace when she slept on the table.
Fovu, Detuza, Zamigo, Marisi. Fovu, Detuza, Zamigo, Marisi. Fovu, Detuza, Zamigo, Marisi. Fovu, Detuza, Zamigo, Marisi. two, nine, three. two, nine, three. two, nine, three. two, nine, three.
After Nela and Tom came to the kitchen, Nela gave a flower to Tom.
The fox walked to the barn. blue, grey, brown, green, black. blue, grey, brown, green, black. The dog saw Tom when he stood on the chair.
The fox saw Jack when he sat in the garden. Felix saw a coin on the bench. The big bird walked to the kitchen.
Felix, Emma, Iris, Grace, Vera, Tom. Felix, Emma, Iris, Grace, Vera, Tom.
Wednesday, Thursday, Friday, Saturday, Sunday.
Leo said that he has a new apple.
The white bird ran to the school and lost the old ball. The dog walked to the shop and found the old key. The blue rabbit went to the garden and saw the brown bell. Grace said that she has a young key.
The king saw Henry when he stood on the bench.
The new boy has a brown bell. Tom helped the girl. Clara sat in the house. Mary sat on the mat. Again Clara is in the house. Then Mary is on the mat. Then Tom helped the girl. Then the new boy bought a brown bell.
After Tom and Kozuli came to the barn, Kozuli gave a coin to Tom.
The big bird slept on the bed. The boy saw the king. The black horse took a brown ball. So the boy saw the king. Then the big bird slept on the bed. Then the black horse has a brown ball. seven, eight, nine, ten. Friday, Saturday, Sunday.
the bear lost an old box on the rug. lonu came to the town
The horse saw Nora when she lay on the wall. The dog helped the cat. The rabbit saw the mouse. The cat bought a brown apple. Again the cat bought a brown apple. So the dog helped the cat. So the rabbit saw the mouse.
After Jack and Buma came to the barn, Jack gave a coin to Buma.
The king met the bear. John sat in the town. The big rabbit helped the teacher. So John is in the town. So the king met the bear. So the big rabbit helped the teacher.
Kate sat on the wall.
anna took a flower on the roof. henry went to the roof and lost the new coin
The farmer took a flower in the park. The bird lost a coin in the park. Iris ran to the bench and found the letter.
After Gavipu and David came to the forest, David brought a book to Gavipu. The new dog went to the school. The king bought a cup. The new boy sat on the mat. So the new boy stood on the mat. So the king bought a cup.
red, brown, black, green. red, brown, black, green.
The rabbit saw Leo when he lay in the town.
The rabbit saw Ben when he stood on the roof.
The bird had a lamp. The black duck found a yellow ball. The rabbit found a flower. Dila met the dog. So the bird had a lamp. Then the black duck bought a yellow ball. Then the rabbit took a flower. So Dila met the dog.
The duck helped the bird. Emma had a ball. Gogo found a key. So Gogo found a key. Then Emma has a ball. Then the duck helped the bird.
Sosigi bought a big letter in the garden. Ben bought a young ball on the table. The young cat walked to the mat and lost the new box. Anna sat in the kitchen.
`,G={sounds:`audio`,images:`images`},ce={sounds:N,images:`image/png,image/jpeg,image/webp,image/gif`},le=[`sounds`,`images`],K=({takes:e})=>le.filter(t=>e.includes(G[t])),q=({takes:e})=>[`target`,`text`].find(t=>e.includes(t));function ue(e,t,n,r){let i=q(e);if(i&&r.length&&r.length!==n.length)return[];let a={sounds:L,images:I}[t];return n.flatMap((e,n)=>{let o=a.get(e),s=i&&r.length?r[n]:``;return o?[{file:e,shown:s?`${e}: ${s}`:e,body:{[G[t]]:[{base64:o.base64}],...i&&s&&{[i]:s}}}]:[]})}function de({model:e,kind:n,files:i,choose:o,written:s,write:c}){let[l,u]=r(null),[d,m]=r(0),h=q(e),_=async e=>{u(null);try{let t=[];for(let r of e)t.push(n===`sounds`?F(L,await P(r)):F(I,await R(r)));t.length&&o(t)}catch(e){u(g(e))}},v=async()=>{u(null);try{let t=[];for(let n of i){m(t.length+1);let{text:r}=await f(`POST`,`v1/audio/transcriptions`,{model:e.id,file:{base64:L.get(n)?.base64}});t.push(r.replace(/\s+/g,` `).trim())}c(t.join(`
`))}catch(e){u(g(e))}m(0)};return y(t,{children:[y(`div`,{class:`fields`,children:[y(`label`,{children:[y(`span`,{children:[n===`sounds`?`Sounds`:`Images`,` `,y(`span`,{class:`hint`,children:i.length?i.join(`, `):`several files at once`})]}),y(`input`,{type:`file`,multiple:!0,accept:ce[n],onChange:({currentTarget:e})=>{_([...e.files??[]]),e.value=``}})]}),h&&y(D,{label:h===`target`?`Transcripts`:`Texts`,hint:`one a line for each of ${a(i.length)} files in their order, or none`,value:s,set:c,rows:4}),n===`sounds`&&h===`target`&&e.generates&&i.length>0&&y(x,{disabled:d>0,onClick:()=>void v(),children:d?`Listening to ${d} of ${i.length}…`:`Transcribe all`})]}),y(p,{problem:l})]})}var J=W(se),fe=5,pe=256,Y={files:[],texts:``},X={own:``,needle:``,sounds:Y,images:Y,last:null},me={texts:[`previous_token`,`induction`],sounds:[`max_weight`,`alignment`],images:[`mean_distance`,`max_weight`]},Z=({texts:e,media:t})=>`${e.length} ${t?.kind??`texts`}`,Q=e=>[...ie,U].find(([t])=>t===e)?.[1]??e,he=e=>oe(e).map(([e,t])=>[e,t]),$=(e,t,n)=>t!==void 0&&t in e.values?t:n;function ge(){let{params:e,go:n,models:r}=C(),i=(r??[]).filter(e=>!e.refused&&(e.takes.includes(`text`)||K(e).length)),[a,o]=(e.source??``).split(/:(.*)/s),s=i.find(({id:e})=>a===`model`&&e===o)??i[0];if(!r)return y(h,{what:`Asking the server for its models`});if(!i.length)return y(`p`,{class:`empty`,children:`The server has no whole model, or no transformers.`});let c=[...s.takes.includes(`text`)?[[`shipped`,`the ${J.length} that ship`],[`own`,`your own`]]:[],...K(s).map(e=>[e,`your ${e}`])],l=c.find(([t])=>t===e.texts)?.[0]??c[0][0];return y(t,{children:[y(`div`,{class:`fields subject`,children:[y(v,{wide:!0,label:`Heads of`,value:s.id,set:e=>n({source:`model:${e}`,layer:``,head:``,passage:``,survey:``}),options:i.map(({id:e})=>[e,e])}),c.length>1&&y(v,{label:K(s).length?`Inputs`:`Texts`,value:l,set:e=>n({texts:e===`shipped`?``:e,passage:``,survey:``}),options:c})]}),y(ve,{model:s,from:l},`${s.id}/${l}`)]})}var _e=e=>e===`sounds`||e===`images`;function ve({model:e,from:i}){let{params:o,go:s,announce:c,refreshModels:l}=C(),[u,d]=r(X.own),[f,m]=r(X.needle),h=i===`own`,_=_e(i)?i:null,[v,S]=r(_?X[_]:Y),w=e=>_&&S(X[_]={...X[_],...e}),T=h?f:``,E=b(()=>_?ue(e,_,v.files,V(v.texts,v.files.length)):[],[_,v,e]),O=b(()=>_?E.map(({shown:e})=>e):h?W(u):J,[_,E,h,u]),k=_??`texts`,[A,j]=r(0),[M,N]=r(null),[P,F]=r(null);n(()=>()=>P?.abort(),[P]);let I=X.last?.of.model===e.id&&X.last.from===i?X.last.of:null,L=I&&(I.texts.join(`
`)!==O.join(`
`)||(I.needle??``)!==T),R=async()=>{let t=new AbortController;F(t),N(null),j(0);try{X.last={of:await re(e.id,O,t.signal,j,T,_?{kind:_,inputs:E}:void 0),from:i},c(`${O.length} ${k} went through ${e.id}.`),e.layers.length||l()}catch(e){t.signal.aborted||N(g(e))}finally{F(null)}},ne=o.survey===`yes`&&i===`shipped`&&!I;n(()=>{ne&&R()},[]);let z=e=>void e?.text().then(e=>d(X.own=e));return y(t,{children:[h&&y(`div`,{class:`fields`,children:[y(D,{label:`Texts`,hint:`one a line; they stay in this browser and go to the server alone${O.length?`. ${a(O.length)} now`:``}`,value:u,set:e=>d(X.own=e),rows:6}),y(`label`,{children:[y(`span`,{children:`or a file`}),y(`input`,{type:`file`,accept:`.txt,text/plain`,onChange:e=>z(e.currentTarget.files?.[0])})]}),y(ee,{wide:!0,label:`Needle`,hint:`optional: words that every text has. The model answers each text; retrieval is the share of these words that a head copies into the answer`,value:f,live:!0,set:e=>m(X.needle=e)})]}),_&&y(de,{model:e,kind:_,files:v.files,choose:e=>w({files:e}),written:v.texts,write:e=>w({texts:e})}),_&&v.files.length>0&&!O.length&&y(`p`,{role:`status`,children:[a(V(v.texts,v.files.length).length),` lines for `,a(v.files.length),` files: write one for each, or none.`]}),y(`div`,{class:`fields`,role:`status`,children:P?y(t,{children:[y(`progress`,{value:A,max:O.length,"aria-label":`Texts that went through the model`}),y(`span`,{children:A?`${a(A)} of ${a(O.length)} ${k}`:`asking ${e.id}`}),y(x,{onClick:()=>P.abort(),children:`Cancel`})]}):y(x,{class:`primary`,disabled:!O.length,onClick:()=>{s({survey:`yes`},`replace`),R()},children:I&&!L?`Go through them again`:`Go through ${a(O.length)} ${k}`})}),y(p,{problem:M}),P&&!A&&e.state!==`resident`&&y(te,{id:e.id,cancel:()=>P.abort()}),!I&&!P&&!M&&y(`p`,{class:`small`,children:[`Every `,k.slice(0,-1),` goes through `,e.id,` once. Each head then stands at its means of two statistics; click one for its distribution and the passages in which it is strongest.`]}),L&&y(`p`,{role:`status`,children:[`The result below is for the `,a(I.texts.length),` `,k,` that went through before, not for the present ones.`]}),I&&y(ye,{of:I})]})}function ye({of:e}){let{params:t,go:n,theme:r}=C(),[a,o]=me[e.media?.kind??`texts`],[s,c]=[$(e,t.x,a),$(e,t.y,e.needle?U[0]:o)],l=he(e),[u,d]=b(()=>[z(e,s),z(e,c)],[e,s,c]),f=b(()=>e.heads.map((e,t)=>t).sort((e,t)=>d[t]-d[e]),[e,d]),[p,m]=[i(t.layer,-1),i(t.head,-1)],h=e.heads.findIndex(e=>e.layer===p&&e.head===m),g=h<0?f[0]:h,S=[];for(let t of e.heads)S[t.layer]=(S[t.layer]??0)+1;T(S,e.heads[g].layer,e.heads[g].head);let D=t=>n({layer:e.heads[t].layer,head:e.heads[t].head,passage:``}),ee=()=>[[`layer`,`head`,...l.map(([e])=>e)],...e.heads.map((t,n)=>[String(t.ref),t.head,...l.map(([t])=>z(e,t)[n])])],O=()=>Ce(e,s,c,u,d,g,r);return y(`div`,{class:`beside found`,children:[y(`section`,{"aria-label":`All heads`,children:[y(`div`,{class:`fields`,children:[y(v,{label:`Across`,value:s,set:e=>n({x:e}),options:l}),y(v,{label:`Up`,value:c,set:e=>n({y:e}),options:l})]}),y(we,{scene:O(),across:u,up:d,at:g,pick:D,names:e.heads.map(({name:e})=>e),labels:[Q(s),Q(c)]}),y(E,{of:{name:`heads`,label:`all heads`,scene:O,rows:ee,json:()=>({model:e.model,texts:e.texts,heads:e.heads.map((t,n)=>({layer:t.ref,head:t.head,statistics:Object.fromEntries(l.map(([t])=>[t,{...H(e,n,t),strongest:B(e,n,t,fe)}]))}))})}}),y(`details`,{children:[y(`summary`,{children:`As a table`}),y(_,{caption:`Means over ${Z(e)}, by ${Q(c)}`,rows:f,columns:[{head:`head`,header:!0,cell:t=>y(x,{class:`quiet`,"aria-pressed":t===g,onClick:()=>D(t),children:e.heads[t].name})},{head:Q(c),number:!0,cell:e=>w(d[e])},{head:Q(s),number:!0,cell:e=>w(u[e])}]})]})]}),y(be,{of:e,at:g,y:c},g)]})}function be({of:e,at:t,y:n}){let{params:r,go:a,theme:o}=C(),s=e.heads[t],c=$(e,r.by,n),l=H(e,t,c),u=B(e,t,c,fe),f=u.find(({text:e})=>e===i(r.passage,-1))??u.at(0),p=Te(l,`${Q(c)} of ${s.name} over ${Z(e)}`,o);return y(`section`,{"aria-label":s.name,children:[y(`h3`,{children:s.name}),y(`div`,{class:`fields`,children:y(v,{label:`Strongest by`,value:c,set:e=>a({by:e,passage:``}),options:he(e)})}),y(S,{fit:!0,scene:p}),y(d,{facts:[[`mean`,w(l.mean)],[`least`,w(l.quantiles[0])],[`quartiles`,l.quantiles.slice(1,4).map(e=>w(e,3)).join(`, `)],[`largest`,w(l.quantiles[4])]]}),y(E,{of:{name:`distribution`,label:`distribution of the head`,scene:()=>p,rows:()=>[[`text`,c],...B(e,t,c,e.texts.length).map(({text:t,value:n})=>[e.texts[t],n])],json:()=>({head:s.name,statistic:c,...l})}}),y(`h4`,{children:`Passages`}),y(`ol`,{class:`passages`,children:u.map(({text:t,value:n})=>y(`li`,{children:y(`button`,{type:`button`,"aria-pressed":t===f?.text,onClick:()=>a({passage:t}),children:[y(`b`,{children:w(n,3)}),` `,e.texts[t]]})},t))}),f&&y(xe,{of:e,at:t,text:f.text})]})}function xe({of:e,at:t,text:n}){let{go:r}=C(),i=e.heads[t],a=e.media?e.media.inputs[n]:null,o=e=>typeof a?.body[e]==`string`?a.body[e]:``,s=a?{...o(`text`)&&{text:o(`text`)},target:o(`target`),[e.media?.kind===`sounds`?`sound`:`image`]:a.file}:{text:e.texts[n]},c=ae(e,i,n),{value:d,problem:f,busy:g}=u(JSON.stringify(c),async()=>{let{reply:e,tensors:t}=await m(c.path,c.body),{shape:r,data:a}=t[`layers.0.weights`],[o,s]=r.slice(-2),[l,u]=j(e,String(i.ref),0).map(e=>e.tokens.map(A));return{text:n,of:M(o,s,a.subarray(0,o*s)),queries:l,keys:u}});return ne(d),d?y(`div`,{"aria-busy":g||d.text!==n,children:[y(k,{of:d.of,queries:d.queries,keys:d.keys,title:`${i.name} in this passage`,range:`unit`,most:pe}),y(x,{onClick:()=>r({view:`head`,source:`model:${e.model}`,messages:``,...s,layer:i.layer,head:i.head}),children:`Open in Head`}),y(l,{calls:[c]})]}):f?y(p,{problem:f}):y(h,{what:`Asking for the weights of ${i.name}`})}var Se={width:560,height:440,left:58,right:16,top:16,bottom:46};function Ce(t,n,r,i,a,c,l){let{width:u,height:d,left:f,right:p,top:m,bottom:h}=Se,g=o[l],_=e=>{let t=e.filter(Number.isFinite),[n,r]=[Math.min(...t),Math.max(...t)];return r>n?[n,r]:[n-.5,r+.5]},v=e(_(i),[f+10,u-p-10]).nice(5),y=e(_(a),[d-h-10,m+10]).nice(5),b=[];for(let e of y.ticks(5))b.push({kind:`path`,d:`M${f},${y(e)}H${u-p}`,stroke:g.hair},{kind:`text`,x:f-6,y:y(e)+4,text:y.tickFormat(5)(e),anchor:`end`,fill:g.soft});for(let e of v.ticks(5))b.push({kind:`path`,d:`M${v(e)},${m}V${d-h}`,stroke:g.hair},{kind:`text`,x:v(e),y:d-h+16,text:v.tickFormat(5)(e),anchor:`middle`,fill:g.soft});b.push({kind:`text`,x:(f+u-p)/2,y:d-8,text:Q(n),anchor:`middle`,fill:g.ink,size:12}),b.push({kind:`text`,x:13,y:(m+d-h)/2,text:Q(r),anchor:`middle`,turn:-90,fill:g.ink,size:12});let x=Math.max(1,...t.heads.map(({layer:e})=>e));t.heads.forEach((e,t)=>{let[o,u]=[v(i[t]),y(a[t])];return Number.isFinite(o+u)?b.push({kind:`circle`,x:o,y:u,r:t===c?8:5.5,fill:s(l,.35+.65*(e.layer/x)),stroke:t===c?g.second:g.paper,width:t===c?3:1,tip:`${e.name}: ${Q(n)} ${w(i[t],3)}, ${Q(r)} ${w(a[t],3)}`}):b.push({kind:`circle`,x:-99,y:-99,r:5})});let S=[...new Set([c,...[a,i].flatMap(e=>e.map((e,t)=>t).sort((t,n)=>e[n]-e[t]).slice(0,2))])];for(let e of S){let n=v(i[e])>(f+u)/2;b.push({kind:`text`,x:v(i[e])+(n?-11:11),y:y(a[e])+4,text:t.heads[e].name,anchor:n?`end`:`start`,fill:g.ink,bold:e===c})}return{width:u,height:d,title:`Heads of ${t.model}: ${Q(r)} over ${Q(n)}, means over ${Z(t)}`,shapes:b}}function we({scene:e,across:t,up:n,at:i,pick:a,names:o,labels:s}){let[l,u]=r(null),d=c(null),f=l??i,p=(e,r)=>{if(e.key===`Enter`||e.key===` `)a(r);else{let[i,a]={ArrowRight:[t,1],ArrowLeft:[t,-1],ArrowUp:[n,1],ArrowDown:[n,-1]}[e.key]??[null,0];if(!i||e.ctrlKey||e.metaKey||e.altKey)return;let s=o.map((e,t)=>t).sort((e,t)=>i[e]-i[t]),c=s.at(s.indexOf(r)+a)??s[0];d.current?.querySelector(`[data-head="${c}"]`)?.focus()}e.preventDefault()},m=-1;return y(`div`,{class:`scatter`,children:[y(`svg`,{ref:d,class:`drawing fit`,viewBox:`0 0 ${e.width} ${e.height}`,width:e.width,height:e.height,role:`group`,"aria-label":`${e.title}. Arrow keys go from head to head, Enter opens one.`,onPointerLeave:()=>u(null),children:e.shapes.map((e,t)=>{let[n,r]=O(e),s=n;if(e.kind!==`circle`)return y(s,{...r,children:e.kind===`text`?e.text:null},t);let c=m+=1;return y(`g`,{role:`button`,"data-head":c,tabIndex:c===i?0:-1,"aria-pressed":c===i,"aria-label":e.tip??o[c],onClick:()=>a(c),onKeyDown:e=>p(e,c),onFocus:()=>u(c),onBlur:()=>u(null),onPointerEnter:()=>u(c),children:y(s,{...r})},t)})}),y(`p`,{class:`readout`,"aria-hidden":`true`,children:[y(`b`,{children:o[f]}),y(`span`,{children:[s[0],` `,w(t[f],3)]}),y(`span`,{children:[s[1],` `,w(n[f],3)]})]})]})}function Te({mean:t,quantiles:n,counts:r},i,a){let[s,c,l,u,d,f]=[380,150,34,10,28,24],p=o[a],m=Math.max(1,...r),h=(s-l-u)/r.length,g=e=>(c-d-f)*e/m,[_,,,,v]=n,y=e([_,v>_?v:_+1],[l,s-u]),b=[{kind:`text`,x:4,y:16,text:i,size:12,bold:!0,fill:p.ink}];return r.forEach((e,t)=>b.push({kind:`rect`,x:l+t*h,y:c-f-g(e),w:h-1,h:g(e),fill:p.accent,tip:String(e)})),b.push({kind:`path`,d:`M${l},${c-f}H${s-u}`,stroke:p.faint}),b.push({kind:`path`,d:`M${y(t)},${d}V${c-f}`,stroke:p.second,width:1.5,dash:[4,3],tip:`mean ${w(t,3)}`}),b.push({kind:`text`,x:l-5,y:d+8,text:String(m),anchor:`end`,fill:p.soft},{kind:`text`,x:l-5,y:c-f,text:`0`,anchor:`end`,fill:p.soft}),b.push({kind:`text`,x:l,y:c-8,text:w(_,3),fill:p.soft},{kind:`text`,x:s-u,y:c-8,text:w(v,3),anchor:`end`,fill:p.soft}),b.push({kind:`text`,x:(l+s-u)/2,y:c-8,text:`dashed: the mean`,anchor:`middle`,fill:p.soft}),{width:s,height:c,title:i,shapes:b}}export{ge as Find};