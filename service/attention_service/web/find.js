import{At as e,Ct as t,Dt as n,P as r,Q as i,S as a,T as o,Tt as s,a as c,at as l,c as u,dt as d,f,ft as p,g as m,gt as h,h as g,i as _,k as v,kt as y,l as b,n as x,o as S,ot as C,q as w,rt as T,s as E,t as D,u as O,v as k}from"./ui.js";import{S as A,a as j,h as M,l as N,m as P,u as F}from"./app.js";import{u as I}from"./matrix.js";import{o as L,p as R}from"./drawings.js";import{a as z,c as B,d as V,i as ee,l as te,n as H,o as ne,r as re,s as ie,t as U,u as ae}from"./survey.js";import{c as oe,d as se,f as ce,l as W,p as G,u as le}from"./live.js";import{a as ue,t as de}from"./read_tokens.js";import{u as fe,v as pe}from"./subject.js";import{r as me}from"./pointed.js";var he=`When Tom and Grace went to the town, Grace gave a flower to Tom.
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
`,K=({texts:e,media:t})=>`${e.length} ${t?.kind??`texts`}`,q=e=>[...H,U].find(([t])=>t===e)?.[1]??e,ge={width:560,height:440,left:58,right:16,top:16,bottom:46};function _e(e,t,n,r,i,s,c){let{width:l,height:u,left:d,right:f,top:p,bottom:m}=ge,h=a[c],g=e=>{let t=e.filter(Number.isFinite),[n,r]=[Math.min(...t),Math.max(...t)];return r>n?[n,r]:[n-.5,r+.5]},_=R(g(r),[d+10,l-f-10]).nice(5),v=R(g(i),[u-m-10,p+10]).nice(5),y=[];for(let e of v.ticks(5))y.push({kind:`path`,d:`M${d},${v(e)}H${l-f}`,stroke:h.hair},{kind:`text`,x:d-6,y:v(e)+4,text:v.tickFormat(5)(e),anchor:`end`,fill:h.soft});for(let e of _.ticks(5))y.push({kind:`path`,d:`M${_(e)},${p}V${u-m}`,stroke:h.hair},{kind:`text`,x:_(e),y:u-m+16,text:_.tickFormat(5)(e),anchor:`middle`,fill:h.soft});y.push({kind:`text`,x:(d+l-f)/2,y:u-8,text:q(t),anchor:`middle`,fill:h.ink,size:12}),y.push({kind:`text`,x:13,y:(p+u-m)/2,text:q(n),anchor:`middle`,turn:-90,fill:h.ink,size:12});let b=Math.max(1,...e.heads.map(({layer:e})=>e));e.heads.forEach((e,a)=>{let[l,u]=[_(r[a]),v(i[a])];return Number.isFinite(l+u)?y.push({kind:`circle`,x:l,y:u,r:a===s?8:5.5,fill:o(c,.35+.65*(e.layer/b)),stroke:a===s?h.second:h.paper,width:a===s?3:1,tip:`${e.name}: ${q(t)} ${w(r[a],3)}, ${q(n)} ${w(i[a],3)}`}):y.push({kind:`circle`,x:-99,y:-99,r:5})});let x=[...new Set([s,...[i,r].flatMap(e=>e.map((e,t)=>t).sort((t,n)=>e[n]-e[t]).slice(0,2))])];for(let t of x){let n=_(r[t])>(d+l)/2;y.push({kind:`text`,x:_(r[t])+(n?-11:11),y:v(i[t])+4,text:e.heads[t].name,anchor:n?`end`:`start`,fill:h.ink,bold:t===s})}return{width:l,height:u,title:`Heads of ${e.model}: ${q(n)} over ${q(t)}, means over ${K(e)}`,shapes:y}}function ve({scene:e,across:t,up:r,at:i,pick:a,names:o,labels:c}){let[l,u]=n(null),d=s(null),f=l??i,p=(e,n)=>{if(e.key===`Enter`||e.key===` `)a(n);else{let[i,a]={ArrowRight:[t,1],ArrowLeft:[t,-1],ArrowUp:[r,1],ArrowDown:[r,-1]}[e.key]??[null,0];if(!i||e.ctrlKey||e.metaKey||e.altKey)return;let s=o.map((e,t)=>t).sort((e,t)=>i[e]-i[t]),c=s.at(s.indexOf(n)+a)??s[0];d.current?.querySelector(`[data-head="${c}"]`)?.focus()}e.preventDefault()},m=-1;return v(`div`,{class:`scatter`,children:[v(`svg`,{ref:d,class:`drawing fit`,viewBox:`0 0 ${e.width} ${e.height}`,width:e.width,height:e.height,role:`group`,"aria-label":`${e.title}. Arrow keys go from head to head, Enter opens one.`,onPointerLeave:()=>u(null),children:e.shapes.map((e,t)=>{let[n,r]=k(e),s=n;if(e.kind!==`circle`)return v(s,{...r,children:e.kind===`text`?e.text:null},t);let c=m+=1;return v(`g`,{role:`button`,"data-head":c,tabIndex:c===i?0:-1,"aria-pressed":c===i,"aria-label":e.tip??o[c],onClick:()=>a(c),onKeyDown:e=>p(e,c),onFocus:()=>u(c),onBlur:()=>u(null),onPointerEnter:()=>u(c),children:v(s,{...r})},t)})}),v(`p`,{class:`readout`,"aria-hidden":`true`,children:[v(`b`,{children:o[f]}),v(`span`,{children:[c[0],` `,w(t[f],3)]}),v(`span`,{children:[c[1],` `,w(r[f],3)]})]})]})}function ye({mean:e,quantiles:t,counts:n},r,i){let[o,s,c,l,u,d]=[380,150,34,10,28,24],f=a[i],p=Math.max(1,...n),m=(o-c-l)/n.length,h=e=>(s-u-d)*e/p,[g,,,,_]=t,v=R([g,_>g?_:g+1],[c,o-l]),y=[{kind:`text`,x:4,y:16,text:r,size:12,bold:!0,fill:f.ink}];return n.forEach((e,t)=>y.push({kind:`rect`,x:c+t*m,y:s-d-h(e),w:m-1,h:h(e),fill:f.accent,tip:String(e)})),y.push({kind:`path`,d:`M${c},${s-d}H${o-l}`,stroke:f.faint}),y.push({kind:`path`,d:`M${v(e)},${u}V${s-d}`,stroke:f.second,width:1.5,dash:[4,3],tip:`mean ${w(e,3)}`}),y.push({kind:`text`,x:c-5,y:u+8,text:String(p),anchor:`end`,fill:f.soft},{kind:`text`,x:c-5,y:s-d,text:`0`,anchor:`end`,fill:f.soft}),y.push({kind:`text`,x:c,y:s-8,text:w(g,3),fill:f.soft},{kind:`text`,x:o-l,y:s-8,text:w(_,3),anchor:`end`,fill:f.soft}),y.push({kind:`text`,x:(c+o-l)/2,y:s-8,text:`dashed: the mean`,anchor:`middle`,fill:f.soft}),{width:o,height:s,title:r,shapes:y}}var be={sounds:`audio`,images:`images`},xe={sounds:oe,images:`image/png,image/jpeg,image/webp,image/gif`},Se=[`sounds`,`images`],J=({takes:e})=>Se.filter(t=>e.includes(be[t])),Ce=({takes:e})=>[`target`,`text`].find(t=>e.includes(t));function we(e,t,n,r){let i=Ce(e);if(i&&r.length&&r.length!==n.length)return[];let a={sounds:G,images:W}[t];return n.flatMap((e,n)=>{let o=a.get(e),s=i&&r.length?r[n]:``;return o?[{file:e,shown:s?`${e}: ${s}`:e,body:{[be[t]]:[{base64:o.base64}],...i&&s&&{[i]:s}}}]:[]})}function Te({model:t,kind:r,files:a,choose:o,written:s,write:c}){let[l,u]=n(null),[p,m]=n(0),g=Ce(t),_=async e=>{u(null);try{let t=[];for(let n of e)t.push(r===`sounds`?ce(G,await se(n)):ce(W,await le(n)));t.length&&o(t)}catch(e){u(h(e))}},y=async()=>{u(null);try{let e=[];for(let n of a){m(e.length+1);let{text:r}=await d(`POST`,`v1/audio/transcriptions`,{model:t.id,file:{base64:G.get(n)?.base64}});e.push(r.replace(/\s+/g,` `).trim())}c(e.join(`
`))}catch(e){u(h(e))}m(0)};return v(e,{children:[v(`div`,{class:`fields`,children:[v(`label`,{children:[v(`span`,{children:[r===`sounds`?`Sounds`:`Images`,` `,v(`span`,{class:`hint`,children:a.length?a.join(`, `):`several files at once`})]}),v(`input`,{type:`file`,multiple:!0,accept:xe[r],onChange:({currentTarget:e})=>{_([...e.files??[]]),e.value=``}})]}),g&&v(D,{label:g===`target`?`Transcripts`:`Texts`,hint:`one a line for each of ${i(a.length)} files in their order, or none`,value:s,set:c,rows:4}),r===`sounds`&&g===`target`&&t.generates&&a.length>0&&v(x,{disabled:p>0,onClick:()=>void y(),children:p?`Listening to ${p} of ${a.length}…`:`Transcribe all`})]}),v(f,{problem:l})]})}var Ee=/^(\d+)\s*[-–→>:]\s*(\d+)$/;function De(e,t=1/0){let n=[],r=``;for(let i of e.split(/[,;\n]+/).map(e=>e.trim()).filter(Boolean)){let e=Ee.exec(i),a=e&&[Number(e[1]),Number(e[2])];a?Math.max(...a)>=t?r||=`There is no token ${Math.max(...a)}: the last one is ${t-1}.`:n.some(([e,t])=>e===a[0]&&t===a[1])||n.push(a):r||=`“${i}” is no pair: write the numbers of a query and a key, as in 3-7.`}return{pairs:n,fault:r}}var Oe=e=>e.map(e=>e.join(`-`)).join(`, `),Y=[[`share`,`query → key`,`the mean weight from the query to the key`],[`first`,`key is first`,`the share of pairs whose key has the largest weight of its query`],[`swapped_share`,`key → query`,`the mean weight from the key to the query`],[`swapped_first`,`query is first`,`the share of pairs whose query has the largest weight of its key`],[`both_share`,`both added`,`the mean of both weights added`],[`both_first`,`first of both`,`the share of pairs whose key has the largest sum of both weights`]];function ke({layers:e},t){return e.flatMap(({layer:e,statistics:{pairs:t}},n)=>(t.share??[]).map((r,i)=>({ref:String(e),row:n,head:i,name:fe(e,i),values:Object.fromEntries(Y.map(([e])=>[e,t[e]?.[i]??NaN]))}))).sort((e,n)=>n.values[t]-e.values[t])}function Ae({layers:e}){let t=e.some(({layer:e})=>String(e).startsWith(`encoder.`)),n=e.map(({layer:e})=>e).filter(e=>!/^(vision|audio|cross)\./.test(String(e))&&(!t||String(e).startsWith(`encoder.`)));return n.length<e.length?n:null}var je=256;function Me({model:r}){let{params:i,go:a,announce:o,refreshModels:s}=C(),{chat:c,text:u}=ue(i,r),[p,h]=n(u),[g,_]=n(null),[y,b]=n(null);t(()=>h(u),[u]);let S=c?{messages:c}:{text:u},w=JSON.stringify(S);t(()=>_(null),[w]);let{value:T,problem:E}=l(w,async()=>{let e=await d(`POST`,`v1/models/${encodeURIComponent(r.id)}/forward`,{...S,top_k:0});return r.layers.length||s(),{key:w,tokens:(e.encoder_labels??e.labels).tokens.map(M)}}),D=T?.key===w?T.tokens:null,{pairs:k,fault:A}=De(i.pairs??``,D?.length),P=e=>a({pairs:Oe(e),layer:``,head:``}),I=e=>{g===null?(_(e),o(`Query ${e} ${D?.[e]??``}. Choose its key.`)):(_(null),P(De(Oe([...k,[g,e]])).pairs),o(`Pair ${g}-${e}.`))},L=e=>[`token ${e}`,...k.flatMap(([t,n])=>t===e?[`looks at ${n}`]:n===e?[`is looked at by ${t}`]:[])].join(`, `),R=e=>e===g?`query`:k.some(t=>t.includes(e))?`key`:void 0,z=()=>{(c||p.trim())&&a({text:p===`Kate met Tamiro in the park. Then Tam`?``:p,...p===u?{}:{pairs:``}})};return v(e,{children:[v(`form`,{class:`sentence`,onSubmit:e=>{e.preventDefault(),z()},children:[c?v(N,{turns:c}):v(F,{label:`Text`,value:p,write:h}),!c&&v(`button`,{type:`submit`,class:`primary`,disabled:!p.trim(),children:`Read`})]}),v(f,{problem:E}),!D&&!E&&v(j,{id:r.id,cancel:()=>void 0}),D&&v(e,{children:[v(de,{label:`The tokens of the text`,tokens:D.map((e,t)=>({name:e,value:NaN,said:L(t),mark:R(t)})),most:1,at:y,read:b,pick:I}),v(`p`,{role:`status`,class:`small`,children:g===null?`Click the query of a pair, then its key; or type the numbers of their tokens.`:v(e,{children:[`The query is `,g,` `,D[g],`. Click its key. `,v(x,{class:`quiet`,onClick:()=>_(null),children:`Another query`})]})}),v(`div`,{class:`fields`,children:v(O,{wide:!0,label:`Pairs`,hint:`query-key, query-key`,value:i.pairs??``,placeholder:`3-7, 10-12`,set:e=>a({pairs:e.trim(),layer:``,head:``})})}),A&&v(`p`,{role:`status`,children:A}),k.length>0&&v(`p`,{class:`actions pairs`,children:k.map(([e,t],n)=>v(x,{class:`quiet`,onClick:()=>P(k.filter((e,t)=>t!==n)),children:[e,` `,D[e],` → `,t,` `,D[t],v(`span`,{class:`hidden`,children:`, remove`}),v(`span`,{"aria-hidden":`true`,children:` ×`})]},n))}),k.length>0&&(r.layers.length?v(Ne,{model:r,input:S,pairs:k,tokens:D},w):v(m,{what:`Asking for the layers of the model`}))]})]})}function Ne({model:e,input:t,pairs:n,tokens:i}){let{params:a,go:o,theme:s}=C(),[u,p]=Y.find(([e])=>e===a.rank)??Y[0],h=Ae(e),y={method:`POST`,path:V(e.id),body:{...t,...h&&{layers:h},statistics:[`pairs`],return_weights:!1,statistic_options:{pairs:n}}},{value:D,problem:O,busy:k}=l(JSON.stringify(y.body),e=>d(y.method,y.path,y.body,e)),A=D?ke(D,u):[],j=t=>e.layers.findIndex(({layer:e})=>String(e)===t),M=A.find(({ref:e,head:t})=>j(e)===r(a.layer,-1)&&t===r(a.head,-1))??A.at(0);if(T(e.layers.map(({heads:e})=>e),M?j(M.ref):0,M?.head??0),O)return v(b,{problem:O,children:v(f,{problem:O})});if(!D||!M)return v(m,{what:`Asking for the weights at the pairs`});let N=Math.max(...A.map(({head:e})=>e))+1,P=I(D.layers.length,N);for(let{row:e,head:t,values:n}of A)P.data[e*N+t]=n[u];let F=L(P,{theme:s,title:`${p} at the pairs`,queries:D.layers.map(({layer:e})=>String(e)),keys:Array.from({length:N},(e,t)=>`H${t}`),axes:[`layers`,`heads`],signed:P.data.some(e=>e<0)});return v(`div`,{class:`beside found linking`,"aria-busy":k,children:[v(`section`,{"aria-label":`All heads`,children:[v(`div`,{class:`fields`,children:v(_,{label:`Rank by`,value:u,set:e=>o({rank:e===Y[0][0]?``:e}),options:Y.map(([e,t,n])=>[e,`${t}: ${n}`])})}),v(S,{fit:!0,scene:F}),v(E,{of:{name:`pairs`,label:`heads at the pairs`,scene:()=>F,rows:()=>[[`head`,...Y.map(([e])=>e)],...A.map(({name:e,values:t})=>[e,...Y.map(([e])=>t[e])])],json:()=>({request:y.body,heads:A})}}),v(g,{caption:`Heads by ${p}, over ${n.length} ${n.length===1?`pair`:`pairs`}`,rows:A,columns:[{head:`head`,header:!0,cell:e=>v(x,{class:`quiet`,"aria-pressed":e===M,onClick:()=>o({layer:j(e.ref),head:e.head}),children:e.name})},...Y.map(([e,t,n])=>({head:t,title:n,number:!0,cell:({values:t})=>w(t[e],3)}))]}),v(c,{calls:[y]})]}),v(Pe,{model:e,input:t,pairs:n,tokens:i,head:M,layer:j(M.ref)},M.name)]})}function Pe({model:t,input:n,pairs:r,tokens:i,head:{ref:a,head:o,name:s},layer:c}){let{go:u}=C(),d={...n,layers:[pe(a)],select:{heads:[o]},statistics:[]},{value:h,problem:_}=l(JSON.stringify(d),async()=>{let{shape:e,data:n}=(await p(V(t.id),d)).tensors[`layers.0.weights`],[r,i]=e.slice(-2);return{...I(r,i,n.subarray(0,r*i)),...n.some(e=>e<0)&&{signed:!0}}}),y=(e,t)=>h&&e<h.rows&&t<h.columns?h.data[e*h.columns+t]:NaN;return v(`section`,{"aria-label":s,children:[v(`h3`,{children:s}),_?v(f,{problem:_}):h?v(e,{children:[v(g,{caption:`${s} at each pair`,rows:r,columns:[{head:`pair`,header:!0,cell:e=>e.join(`-`)},{head:`query`,cell:([e])=>i[e]},{head:`key`,cell:([,e])=>i[e]},{head:`query → key`,number:!0,cell:([e,t])=>w(y(e,t),3)},{head:`key → query`,number:!0,cell:([e,t])=>w(y(t,e),3)}]}),v(A,{of:h,queries:i,keys:i,title:s,range:h.signed?`own`:`unit`,most:je}),v(x,{onClick:()=>u({view:`head`,source:`model:${t.id}`,layer:c,head:o,query:r[0][0]}),children:`Open in Head`})]}):v(m,{what:`Asking for the weights of ${s}`})]})}var Fe=ae(he),Ie=5,X=`pairs`,Le=256,Z={files:[],texts:``},Q={own:``,needle:``,sounds:Z,images:Z,last:null},Re={texts:[`previous_token`,`induction`],sounds:[`max_weight`,`alignment`],images:[`mean_distance`,`max_weight`]},ze=e=>ie(e).map(([e,t])=>[e,t]),$=(e,t,n)=>t!==void 0&&t in e.values?t:n;function Be(){let{params:t,go:n,models:r}=C(),i=(r??[]).filter(e=>!e.refused&&(e.takes.includes(`text`)||J(e).length)),[a,o]=(t.source??``).split(/:(.*)/s),s=i.find(({id:e})=>a===`model`&&e===o)??i[0];if(!r)return v(m,{what:`Asking the server for its models`});if(!i.length)return v(`p`,{class:`empty`,children:`The server has no whole model, or no transformers.`});let c=s.takes.includes(`text`)?[[`shipped`,`the ${Fe.length} that ship`],[`own`,`your own`]]:[],l=[...c,...J(s).map(e=>[e,`your ${e}`])],u=l.find(([e])=>e===t.texts)?.[0]??l[0][0],d=t.find===X&&s.takes.includes(`text`);return v(e,{children:[v(`div`,{class:`fields subject`,children:[v(_,{wide:!0,label:`Heads of`,value:s.id,set:e=>n({source:`model:${e}`,layer:``,head:``,passage:``,survey:``,pairs:``}),options:i.map(({id:e})=>[e,e])}),c.length>0&&v(_,{label:`Find`,value:d?X:``,set:e=>n({find:e,layer:``,head:``}),options:[[``,`heads by what they do in many texts`],[X,`heads that link my pairs of tokens`]]}),!d&&l.length>1&&v(_,{label:J(s).length?`Inputs`:`Texts`,value:u,set:e=>n({texts:e===`shipped`?``:e,passage:``,survey:``}),options:l})]}),d?v(Me,{model:s},s.id):v(He,{model:s,from:u},`${s.id}/${u}`)]})}var Ve=e=>e===`sounds`||e===`images`;function He({model:r,from:a}){let{params:o,go:s,announce:c,refreshModels:l}=C(),[u,d]=n(Q.own),[p,m]=n(Q.needle),g=a===`own`,_=Ve(a)?a:null,[b,S]=n(_?Q[_]:Z),w=e=>_&&S(Q[_]={...Q[_],...e}),T=g?p:``,E=y(()=>_?we(r,_,b.files,ee(b.texts,b.files.length)):[],[_,b,r]),k=y(()=>_?E.map(({shown:e})=>e):g?ae(u):Fe,[_,E,g,u]),A=_??`texts`,[M,N]=n(0),[P,F]=n(null),[I,L]=n(null);t(()=>()=>I?.abort(),[I]);let R=Q.last?.of.model===r.id&&Q.last.from===a?Q.last.of:null,z=R&&(R.texts.join(`
`)!==k.join(`
`)||(R.needle??``)!==T),B=async()=>{let e=new AbortController;L(e),F(null),N(0);try{Q.last={of:await te(r.id,k,e.signal,N,T,_?{kind:_,inputs:E}:void 0),from:a},c(`${k.length} ${A} went through ${r.id}.`),r.layers.length||l()}catch(t){e.signal.aborted||F(h(t))}finally{L(null)}},V=o.survey===`yes`&&a===`shipped`&&!R;t(()=>{V&&B()},[]);let H=e=>void e?.text().then(e=>d(Q.own=e));return v(e,{children:[g&&v(`div`,{class:`fields`,children:[v(D,{label:`Texts`,hint:`one a line; they stay in this browser and go to the server alone${k.length?`. ${i(k.length)} now`:``}`,value:u,set:e=>d(Q.own=e),rows:6}),v(`label`,{children:[v(`span`,{children:`or a file`}),v(`input`,{type:`file`,accept:`.txt,text/plain`,onChange:e=>H(e.currentTarget.files?.[0])})]}),v(O,{wide:!0,label:`Needle`,hint:`optional: words that every text has. The model answers each text; retrieval is the share of these words that a head copies into the answer`,value:p,live:!0,set:e=>m(Q.needle=e)})]}),_&&v(Te,{model:r,kind:_,files:b.files,choose:e=>w({files:e}),written:b.texts,write:e=>w({texts:e})}),_&&b.files.length>0&&!k.length&&v(`p`,{role:`status`,children:[i(ee(b.texts,b.files.length).length),` lines for `,i(b.files.length),` files: write one for each, or none.`]}),v(`div`,{class:`fields`,role:`status`,children:I?v(e,{children:[v(`progress`,{value:M,max:k.length,"aria-label":`Texts that went through the model`}),v(`span`,{children:M?`${i(M)} of ${i(k.length)} ${A}`:`asking ${r.id}`}),v(x,{onClick:()=>I.abort(),children:`Cancel`})]}):v(x,{class:`primary`,disabled:!k.length,onClick:()=>{s({survey:`yes`},`replace`),B()},children:R&&!z?`Go through them again`:`Go through ${i(k.length)} ${A}`})}),v(f,{problem:P}),I&&!M&&r.state!==`resident`&&v(j,{id:r.id,cancel:()=>I.abort()}),!R&&!I&&!P&&v(`p`,{class:`small`,children:[`Every `,A.slice(0,-1),` goes through `,r.id,` once. Each head then stands at its means of two statistics; click one for its distribution and the passages in which it is strongest.`]}),z&&v(`p`,{role:`status`,children:[`The result below is for the `,i(R.texts.length),` `,A,` that went through before, not for the present ones.`]}),R&&v(Ue,{of:R})]})}function Ue({of:e}){let{params:t,go:n,theme:i}=C(),[a,o]=Re[e.media?.kind??`texts`],[s,c]=[$(e,t.x,a),$(e,t.y,e.needle?U[0]:o)],l=ze(e),[u,d]=y(()=>[z(e,s),z(e,c)],[e,s,c]),f=y(()=>e.heads.map((e,t)=>t).sort((e,t)=>d[t]-d[e]),[e,d]),[p,m]=[r(t.layer,-1),r(t.head,-1)],h=e.heads.findIndex(e=>e.layer===p&&e.head===m),b=h<0?f[0]:h,S=[];for(let t of e.heads)S[t.layer]=(S[t.layer]??0)+1;T(S,e.heads[b].layer,e.heads[b].head);let D=t=>n({layer:e.heads[t].layer,head:e.heads[t].head,passage:``}),O=()=>[[`layer`,`head`,...l.map(([e])=>e)],...e.heads.map((t,n)=>[String(t.ref),t.head,...l.map(([t])=>z(e,t)[n])])],k=()=>_e(e,s,c,u,d,b,i);return v(`div`,{class:`beside found`,children:[v(`section`,{"aria-label":`All heads`,children:[v(`div`,{class:`fields`,children:[v(_,{label:`Across`,value:s,set:e=>n({x:e}),options:l}),v(_,{label:`Up`,value:c,set:e=>n({y:e}),options:l})]}),v(ve,{scene:k(),across:u,up:d,at:b,pick:D,names:e.heads.map(({name:e})=>e),labels:[q(s),q(c)]}),v(E,{of:{name:`heads`,label:`all heads`,scene:k,rows:O,json:()=>({model:e.model,texts:e.texts,heads:e.heads.map((t,n)=>({layer:t.ref,head:t.head,statistics:Object.fromEntries(l.map(([t])=>[t,{...re(e,n,t),strongest:B(e,n,t,Ie)}]))}))})}}),v(`details`,{children:[v(`summary`,{children:`As a table`}),v(g,{caption:`Means over ${K(e)}, by ${q(c)}`,rows:f,columns:[{head:`head`,header:!0,cell:t=>v(x,{class:`quiet`,"aria-pressed":t===b,onClick:()=>D(t),children:e.heads[t].name})},{head:q(c),number:!0,cell:e=>w(d[e])},{head:q(s),number:!0,cell:e=>w(u[e])}]})]})]}),v(We,{of:e,at:b,y:c},b)]})}function We({of:e,at:t,y:n}){let{params:i,go:a,theme:o}=C(),s=e.heads[t],c=$(e,i.by,n),l=re(e,t,c),d=B(e,t,c,Ie),f=d.find(({text:e})=>e===r(i.passage,-1))??d.at(0),p=ye(l,`${q(c)} of ${s.name} over ${K(e)}`,o);return v(`section`,{"aria-label":s.name,children:[v(`h3`,{children:s.name}),v(`div`,{class:`fields`,children:v(_,{label:`Strongest by`,value:c,set:e=>a({by:e,passage:``}),options:ze(e)})}),v(S,{fit:!0,scene:p}),v(u,{facts:[[`mean`,w(l.mean)],[`least`,w(l.quantiles[0])],[`quartiles`,l.quantiles.slice(1,4).map(e=>w(e,3)).join(`, `)],[`largest`,w(l.quantiles[4])]]}),v(E,{of:{name:`distribution`,label:`distribution of the head`,scene:()=>p,rows:()=>[[`text`,c],...B(e,t,c,e.texts.length).map(({text:t,value:n})=>[e.texts[t],n])],json:()=>({head:s.name,statistic:c,...l})}}),v(`h4`,{children:`Passages`}),v(`ol`,{class:`passages`,children:d.map(({text:t,value:n})=>v(`li`,{children:v(`button`,{type:`button`,"aria-pressed":t===f?.text,onClick:()=>a({passage:t}),children:[v(`b`,{children:w(n,3)}),` `,e.texts[t]]})},t))}),f&&v(Ge,{of:e,at:t,text:f.text})]})}function Ge({of:e,at:t,text:n}){let{go:r}=C(),i=e.heads[t],a=e.media?e.media.inputs[n]:null,o=e=>typeof a?.body[e]==`string`?a.body[e]:``,s=a?{...o(`text`)&&{text:o(`text`)},target:o(`target`),[e.media?.kind===`sounds`?`sound`:`image`]:a.file}:{text:e.texts[n]},u=ne(e,i,n),{value:d,problem:h,busy:g}=l(JSON.stringify(u),async()=>{let{reply:e,tensors:t}=await p(u.path,u.body),{shape:r,data:a}=t[`layers.0.weights`],[o,s]=r.slice(-2),[c,l]=P(e,String(i.ref),0).map(e=>e.tokens.map(M));return{text:n,of:I(o,s,a.subarray(0,o*s)),queries:c,keys:l}});return me(d),d?v(`div`,{"aria-busy":g||d.text!==n,children:[v(A,{of:d.of,queries:d.queries,keys:d.keys,title:`${i.name} in this passage`,range:`unit`,most:Le}),v(x,{onClick:()=>r({view:`head`,source:`model:${e.model}`,messages:``,...s,layer:i.layer,head:i.head}),children:`Open in Head`}),v(c,{calls:[u]})]}):h?v(f,{problem:h}):v(m,{what:`Asking for the weights of ${i.name}`})}export{Be as Find};